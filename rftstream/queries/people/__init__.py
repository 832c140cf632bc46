"""What people were asked, what they said, how they judge, and what was made of it."""
