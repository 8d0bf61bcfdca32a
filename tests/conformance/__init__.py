"""The kit on our own drivers, and the test of the kit."""
