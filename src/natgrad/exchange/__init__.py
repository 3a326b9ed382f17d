"""What travels of gradients where the ranks work for some layers only: raw ones to the workers, natural ones back."""

from natgrad.exchange.collect import collect
from natgrad.exchange.deliver import deliver
from natgrad.exchange.early import Early
from natgrad.exchange.reduce import reduce_to_workers
from natgrad.exchange.routes import Left

__all__ = ["Early", "Left", "collect", "deliver", "reduce_to_workers"]
