"""What a run leaves behind: its folder, its state, its scores, its bytes."""
