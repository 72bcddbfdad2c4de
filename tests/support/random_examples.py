"""How many random examples a test draws."""

import hypothesis


def examples(count: int) -> hypothesis.settings:
    """That many: a part of them in `make test` and `make check`, and more in proportion in `make fuzz`."""
    return hypothesis.settings(max_examples=count * hypothesis.settings.default.max_examples // 100)
