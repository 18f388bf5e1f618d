"""Settings that all tests share."""

from hypothesis import Phase, settings

# For the mutants: the first counterexample is enough, nobody reads it.
settings.register_profile("first-failure", phases=[Phase.generate], print_blob=False)
