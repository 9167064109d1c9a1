"""Excerpts: what is told of a text that is too long to be told whole. Pure."""


def head(text: str, most: int) -> str:
    """The text; of one with more than `most` characters its beginning."""
    return text if len(text) <= most else f"{text[:most]} ..."


def excerpt(text: str, most: int) -> str:
    """The text; of one with more than `most` characters the head and the tail, and how many were left out between them."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    first = most // 2
    return f"{text[:first]} [... {left_out:,} characters are left out ...] {text[first + left_out :]}"
