"""Pictures of which device holds which block of an array.

`visualize` draws them for every array of a tree. They print as text, and notebooks display them.
"""

from scalax.visualize._blocks import Blocks, Dimension
from scalax.visualize._pictures import Member, Picture
from scalax.visualize._visualization import Visualization, visualize

__all__ = ['Blocks', 'Dimension', 'Member', 'Picture', 'Visualization', 'visualize']
