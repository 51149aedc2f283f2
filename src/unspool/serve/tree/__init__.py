"""`/v1/tree`: texts as branches that can be taken back, changed and gone on with."""
