"""Studies of operators on several teachers and seeds (``python -m train study``)."""
