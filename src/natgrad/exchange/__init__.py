"""What travels of gradients where the ranks work for some layers only: raw ones to the workers, natural ones back."""

from natgrad.exchange.collect import collect
from natgrad.exchange.deliver import deliver
from natgrad.exchange.reduce import Left, reduce_to_workers

__all__ = ["Left", "collect", "deliver", "reduce_to_workers"]
