"""JSON files that know their own checksum: the last member is the crc32c of all the text before it.

Owns that convention. Pure.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import crc32c

from checkpoint.described import parsed

_TAIL = re.compile(rb',\n "crc32c": "([0-9a-f]{8})"\n}\n')
_TAIL_BYTES = len(b',\n "crc32c": "00000000"\n}\n')


def seal(document: Mapping[str, Any]) -> bytes:
    """The text of a document that has at least one member."""
    body = json.dumps(document, indent=1, ensure_ascii=False).removesuffix("\n}").encode()
    return body + b',\n "crc32c": "%08x"\n}\n' % crc32c.crc32c(body)


def unseal(text: bytes) -> Any:
    """The document. Raises ValueError where the text is not what was sealed, or no JSON."""
    tail = _TAIL.fullmatch(text[-_TAIL_BYTES:])
    if tail is None or int(tail[1], 16) != crc32c.crc32c(text[:-_TAIL_BYTES]):
        raise ValueError("does not match its own checksum")
    return parsed(text)
