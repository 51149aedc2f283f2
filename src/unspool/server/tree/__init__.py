"""`/v1/tree`: texts as branches that can be rewound, edited, forked and resumed."""
