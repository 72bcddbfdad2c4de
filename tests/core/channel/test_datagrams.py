"""Signed requests and responses over UDP: each counts once, and a client without the secret gets no data."""

import pytest

from scalax._core.channel import datagrams
from scalax._core.channel.datagrams import HEAD, Client, Server

SECRET, OTHER = b'of this run, and long enough', b'of another run, as long as that'


def introduce(client: Client, server: Server) -> None:
    """Lets the client learn the server's nonce."""
    request, is_new = server.read_request(client.request(b''))
    assert not is_new
    assert client.read_response(server.respond(request, b'')) is None


@pytest.mark.parametrize('secret', [SECRET, b''])
def test_requests_get_responses(secret: bytes) -> None:
    client, server = Client(secret), Server(secret, 9)
    introduce(client, server)
    for data in (b'one', b'two'):
        request, is_new = server.read_request(client.request(data))
        assert is_new and request.data == data
        assert client.read_response(server.respond(request, b'response to ' + data)) == b'response to ' + data


def test_a_replayed_request_counts_once() -> None:
    client, server = Client(SECRET), Server(SECRET, 9)
    first = client.request(b'')
    request, is_new = server.read_request(first)
    assert not is_new and client.read_response(server.respond(request, b'')) is None
    second, third = client.request(b'two'), client.request(b'three')
    server.read_request(third)
    for packet in (second, third):
        with pytest.raises(ValueError, match='a request that was received before'):
            server.read_request(packet)
    # A request without a nonce, or with an old one, only gets the new nonce.
    assert not server.read_request(first)[1]
    assert not Server(SECRET, 9).read_request(third)[1]


def test_a_response_belongs_to_an_open_request() -> None:
    client, other, server = Client(SECRET), Client(SECRET), Server(SECRET, 9)
    introduce(client, server)
    request, _ = server.read_request(client.request(b'two'))
    response = server.respond(request, b'2')
    assert client.read_response(response) == b'2'
    for side in (client, other):  # a replay, and a response to another client
        with pytest.raises(ValueError, match='a response to another request'):
            side.read_response(response)
    later = server.respond(request._replace(sequence=9), b'9')
    with pytest.raises(ValueError, match='a response to another request'):
        client.read_response(later)


def test_a_packet_is_not_sent_back_to_its_side() -> None:
    client, server = Client(SECRET), Server(SECRET, 9)
    packet = client.request(b'')
    request, _ = server.read_request(packet)
    for read, back in ((client.read_response, packet), (server.read_request, server.respond(request, b''))):
        with pytest.raises(ValueError, match='a message of another program'):
            read(back)


def test_clients_are_forgotten_with_the_nonce() -> None:
    server = Server(SECRET, 2)
    clients = [Client(SECRET) for _ in range(3)]
    for client in clients:
        introduce(client, server)
    old = [client.request(b'a') for client in clients]
    assert [server.read_request(packet)[1] for packet in old] == [True, True, False]
    assert not any(server.read_request(packet)[1] for packet in old)  # of the nonce before
    for client in clients[:2]:
        introduce(client, server)
        assert server.read_request(client.request(b'b'))[1]


@pytest.mark.parametrize('packet', [b'', b'GET / HTTP/1.1', bytes(HEAD - 1), bytes(HEAD), bytes(HEAD + 9)])
def test_unsigned_packets(packet: bytes) -> None:
    for read in (Client(SECRET).read_response, Server(SECRET, 9).read_request):
        with pytest.raises(ValueError, match=r'^a message of another program, or of one .* another secret$'):
            read(packet)


def test_another_secret() -> None:
    with pytest.raises(ValueError, match='another secret'):
        Server(SECRET, 9).read_request(Client(OTHER).request(b''))
    message = datagrams.unpack(OTHER, b'asks', Client(OTHER).request(b'data'))
    assert message.data == b'data' and message.sequence == 1
