"""The theorems' complexity claims, measured on small problems whose gradient and constants are known."""

from nestfed.theory import METHODS

TITLES = {name: METHODS[name].title for name in ("fcsg", "fcsg-m", "acc-fcsg-m", "local-scgdm", "fmgda", "fafed")}
"""The methods whose theorems are measured, with their names in text."""
