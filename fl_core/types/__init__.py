"""What everything is made of: values (Part, Bundle, State), enums, plain records, the interfaces Method /."""
