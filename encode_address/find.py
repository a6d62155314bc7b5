def find():
    pass
