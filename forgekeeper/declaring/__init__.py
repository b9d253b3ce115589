"""What a batch answers with: values that say what goes, and do nothing."""
