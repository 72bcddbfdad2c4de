"""Building blocks of everything that is shown or saved: tables of text, pages, and JSON with a version.

Reports, pictures, plans and searches take their tables, sizes, colours and pages from here.
"""
