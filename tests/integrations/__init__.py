from tests.torchvision_operators import declare

declare()
