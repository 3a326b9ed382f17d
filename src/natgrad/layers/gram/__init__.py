"""Gram products: the factor statistics of K-FAC, as pure tensor functions.

`add_row_gram_` serves linear layers, `add_channel_gram_` and `add_patch_gram_` convolutions. They write lower triangles
only; the elements above are undefined.
"""

from natgrad.layers.gram.patches import add_channel_gram_, add_patch_gram_
from natgrad.layers.gram.rows import add_row_gram_

__all__ = ["add_channel_gram_", "add_patch_gram_", "add_row_gram_"]
