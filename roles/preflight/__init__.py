"""Everything is looked at before anything is changed."""
