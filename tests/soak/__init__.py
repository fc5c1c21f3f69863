"""Long runs against a real server: kills and load. Short versions run with the suite."""
