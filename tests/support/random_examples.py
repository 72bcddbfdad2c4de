"""The number of random examples that a test draws."""

import hypothesis


def examples(count: int) -> hypothesis.settings:
    """Returns settings for *count* examples: fewer in `make test` and `make check`, more in `make fuzz`."""
    return hypothesis.settings(max_examples=count * hypothesis.settings.default.max_examples // 100)
