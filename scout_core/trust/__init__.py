"""Trust: states, manifests, certification, recovery selection, and the GEMINI memory tier."""
