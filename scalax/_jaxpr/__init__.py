"""Analysis of jaxprs: the dimension rule of each primitive, and an abstract interpreter of values."""
