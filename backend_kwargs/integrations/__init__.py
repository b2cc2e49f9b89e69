"""What a framework needs beside the name of a backend; each module imports its framework."""
