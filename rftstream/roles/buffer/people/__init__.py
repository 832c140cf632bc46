"""What people say of rollouts, and what their judgements change about groups."""
