"""Enrolment: an invitation becomes a certificate, a certificate becomes its successor."""

from __future__ import annotations

import logging

from coordinator.api.authorization import Authorizer, Context
from coordinator.pki.membership import Membership
from protos.consilium.v1 import federation_pb2 as pb
from protos.consilium.v1 import federation_pb2_grpc as rpc

audit = logging.getLogger("consilium.audit")


class EnrolmentService(rpc.EnrolmentServicer):
    """Join and Renew."""

    def __init__(self, authorizer: Authorizer, membership: Membership) -> None:
        self._authorizer = authorizer
        self._membership = membership

    def Join(self, request: pb.JoinRequest, context: Context) -> pb.Membership:  # noqa: N802
        """Sign the request of an invited silo; the same request gets the same certificate until its first use."""
        peer = self._authorizer.caller(context)
        made = self._membership.join(peer, request.csr_pem, request.renewal_proof)
        audit.info("%s enrolled from %s", peer.identity.name, context.peer())
        return made

    def Renew(self, request: pb.RenewRequest, context: Context) -> pb.Membership:  # noqa: N802
        peer = self._authorizer.caller(context)
        made = self._membership.renew(peer, request.csr_pem, request.renewal_proof)
        audit.info("%s renewed its certificate", peer.identity.name)
        return made
