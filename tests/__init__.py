"""The tests of Meshwright."""
