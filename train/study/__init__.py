"""Studies that compare operators on several teachers and seeds (``python -m train study``)."""
