"""A compiled module with a life: built, activated, saved as a bundle, and served elsewhere without a compile."""
