"""The paper's tables, one command each (``python -m train table NAME``)."""
