"""The plan of a step: its data, its page, and the sections of the page."""
