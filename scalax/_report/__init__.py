"""Building blocks of everything that is shown: tables of text, self-contained pages, assets."""
