"""The tests of the conformance suite, by subject. `testing.conformance` combines them."""
