"""Which device holds which block of an array? Pictures of trees, for terminals and notebooks."""

from scalax.visualize._blocks import Blocks, Dimension
from scalax.visualize._pictures import Member, Picture
from scalax.visualize._visualization import Visualization, visualize

__all__ = ['Blocks', 'Dimension', 'Member', 'Picture', 'Visualization', 'visualize']
