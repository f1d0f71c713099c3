"""Real weights where no model hub can be reached."""
