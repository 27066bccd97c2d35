"""The update rules, as functions on lists of tensors."""
