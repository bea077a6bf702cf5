def html(records):
    return "x"


def model_card(record, recipe):
    return "x"
