"""The tour: servers, tables, sample data and checks of an example forge.  No production process imports it."""
