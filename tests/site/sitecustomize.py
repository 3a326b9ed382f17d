"""Python imports this first in all processes that tests start."""

import torchvision_finder

torchvision_finder.install()
