"""The theorems' complexity claims, measured on small problems whose gradient and constants are known."""
