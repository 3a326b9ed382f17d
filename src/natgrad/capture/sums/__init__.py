"""The raw sums of a step: collected by the hooks in messages, which travel in the step or before it."""

from natgrad.capture.sums.bucketed import BucketedStatistics as BucketedStatistics
from natgrad.capture.sums.messages import Arrived as Arrived
from natgrad.capture.sums.messages import Departed as Departed
from natgrad.capture.sums.sums import WHOLE as WHOLE
from natgrad.capture.sums.sums import Choice as Choice
from natgrad.capture.sums.sums import StatisticsBuffer as StatisticsBuffer

__all__ = ["WHOLE", "Arrived", "BucketedStatistics", "Choice", "Departed", "StatisticsBuffer"]
