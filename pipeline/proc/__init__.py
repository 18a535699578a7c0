"""Child processes: started, marked, watched, stopped, and none left behind."""
