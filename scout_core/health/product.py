"""How many NVLinks a product must have up. Pure."""

from __future__ import annotations

import re

# Boards whose links are soldered to a baseboard or switch, so that an inactive link is a fault. NVIDIA product
# pages and whitepapers give the counts. PCIe and NVL boards reach NVLink through optional bridges: none expected.
_EXPECTED = (
    (re.compile(r"\bGB(200|300)\b"), 18),
    (re.compile(r"\bB(100|200|300)\b"), 18),
    (re.compile(r"\bH200\b(?! NVL)"), 18),
    (re.compile(r"\bH100 (80GB HBM3|SXM5?|64GB HBM2|96GB HBM3)"), 18),
    (re.compile(r"\bH800 (80GB HBM3|SXM5?)"), 8),
    (re.compile(r"\bH20\b(?! NVL)"), 18),
    (re.compile(r"\bA100-SXM4?\b"), 12),
    (re.compile(r"\bA800-SXM4?\b"), 8),
    (re.compile(r"\bV100-SXM[23]\b"), 6),
    (re.compile(r"\bP100-SXM2\b"), 4),
)
# A superchip is sold alone as well as behind switches: nothing can be expected from its name.
_OPTIONAL = re.compile(r"\bGH200\b|\bPCIe\b|\bNVL\b")


def nvlink_expectation(name: str | None) -> int:
    """Links the product called `name` (NVML device name) has fixed wiring for; 0 when links are optional or unknown."""
    if name is None or _OPTIONAL.search(name):
        return 0
    return next((links for pattern, links in _EXPECTED if pattern.search(name)), 0)
