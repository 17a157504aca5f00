"""octavo inside other libraries: each file imports its framework inside its functions."""
