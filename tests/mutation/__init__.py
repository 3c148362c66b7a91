"""The suite under test: injected faults that the equivalence checks must catch."""
