"""Pictures of which device holds which block of an array.

`visualize` makes them for every array of a tree; they print as text and show themselves in notebooks.
"""

from scalax.visualize._blocks import Blocks, Dimension
from scalax.visualize._pictures import Member, Picture
from scalax.visualize._visualization import Visualization, visualize

__all__ = ['Blocks', 'Dimension', 'Member', 'Picture', 'Visualization', 'visualize']
