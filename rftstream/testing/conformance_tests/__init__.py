"""The tests of the conformance suite, by what they are about. `testing.conformance` puts them together."""
