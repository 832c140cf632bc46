"""From any record to all related records, up and down the flow."""
