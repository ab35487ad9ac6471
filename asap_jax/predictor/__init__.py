"""The predicted dual: features under a head, and corrections between closures."""
