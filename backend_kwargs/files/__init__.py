"""Files written whole, and read within bounds."""
