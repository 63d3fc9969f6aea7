"""The operators, node facts, invariants and printer of the intermediate representation."""
