"""What a framework needs besides the name of a backend; each module imports its framework."""
