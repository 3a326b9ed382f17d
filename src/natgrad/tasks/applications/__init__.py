"""The applications of the papers: models and data sets by name, without torch, so that `natgrad tasks` is fast.

The name of such a task is MODEL-DATA. Its data are read from a folder in the data set's usual layout, or without a
folder are embedded data of the same kind. The data and model of an application are in the module of its name in
`natgrad.tasks`.
"""

from natgrad.tasks.applications.answers import QuestionAnswering, Translation
from natgrad.tasks.applications.base import Application, Architecture, FileApplication, Source
from natgrad.tasks.applications.classification import Classification, ImageNet, Timm
from natgrad.tasks.applications.detection import Detection
from natgrad.tasks.applications.language import Bert, Gpt, Language
from natgrad.tasks.applications.segmentation import Segmentation

__all__ = [
    "APPLICATIONS",
    "Application",
    "Architecture",
    "Bert",
    "Classification",
    "Detection",
    "FileApplication",
    "Gpt",
    "ImageNet",
    "Language",
    "QuestionAnswering",
    "Segmentation",
    "Source",
    "Timm",
    "Translation",
]

APPLICATIONS: tuple[type[Application], ...] = (
    *(Classification, ImageNet, Timm),
    *(Segmentation, Detection),
    *(Bert, Gpt, QuestionAnswering, Translation),
)
"""The applications, each with all its models on all its data sets."""
