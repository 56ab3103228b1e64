"""The release: SGLang and all that it needs, in an environment of its own that is built once and never changed."""
